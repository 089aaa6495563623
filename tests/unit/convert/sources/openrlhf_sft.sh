set -x

# deepspeed starts a process on each of four GPUs
deepspeed --num_gpus 4 --module openrlhf.cli.train_sft \
   --max_len 4096 \
   --dataset org/instructions,org/code \
   --dataset_probs 0.7,0.3 \
   --input_key question --output_key response \
   --input_template $'Question: {}\nAnswer: ' \
   --train_batch_size 256 --micro_train_batch_size 2 \
   --max_samples 500000 --max_epochs 2 \
   --pretrain org/base-8b --save_path ./ckpt/sft-8b --save_steps -1 --eval_steps -1 --logging_steps 1 \
   --zero_stage 2 --param_dtype bf16 --packing_samples \
   --learning_rate 5e-6 --lora_rank 16 --lora_alpha 32 --lora_dropout 0.05 --target_modules q_proj v_proj \
   --gradient_checkpointing
