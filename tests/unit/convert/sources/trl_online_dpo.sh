accelerate launch --num_processes 8 examples/scripts/dpo_online.py \
    --model_name_or_path org/sft --reward_model_path org/rm --dataset_name org/prompts \
    --output_dir runs/online --learning_rate 3e-7 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 \
    --max_new_tokens 53 --max_length 640 --warmup_ratio 0.1 --missing_eos_penalty 1.5 --beta 0.2 \
    --num_train_epochs 2 --use_vllm --vllm_mode colocate --gpu_memory_utilization 0.4 --bf16 \
    --save_strategy no --use_peft --lora_r 8 --lora_dropout 0
