accelerate launch --config_file zero3.yaml --num_processes 8 trl/scripts/dpo.py \
    --dataset_name org/pairs --dataset_train_split train \
    --model_name_or_path org/sft-1b \
    --learning_rate 5.0e-7 --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --max_length 2048 --gradient_checkpointing --eval_strategy no \
    --beta 0.05 --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0 \
    --warmup_steps 20 --optim adamw_torch_fused --bf16 --output_dir dpo-out --save_strategy epoch
