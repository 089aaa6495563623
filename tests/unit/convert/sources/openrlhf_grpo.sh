#!/usr/bin/env bash
# Group-normalised advantages with vLLM on the trainer's own GPUs, as a Ray job.
MODEL=org/base-7b
PROMPTS="org/prompts-a"
GPUS=8

export RAY_DEDUP_LOGS=0
ray job submit --address "http://head:8265" \
  --runtime-env-json='{"env_vars": {"NCCL_DEBUG": "WARN", "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}}' \
  -- python3 -m openrlhf.cli.train_ppo_ray \
  --pretrain ${MODEL} --prompt_data "$PROMPTS" --input_key question --label_key answer --apply_chat_template \
  --advantage_estimator group_norm \
  --actor_num_nodes 1 --actor_num_gpus_per_node $GPUS --ref_num_nodes 1 --ref_num_gpus_per_node $GPUS \
  --vllm_num_engines $((GPUS / 2)) --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5 \
  --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --vllm_sync_backend nccl --enforce_eager \
  --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 512 \
  --micro_train_batch_size 2 --micro_rollout_batch_size 4 --max_epochs 1 --num_episodes 3 \
  --prompt_max_len 1024 --generate_max_len 3072 --max_samples 50000 \
  --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --eps_clip_low_high 0.2 0.28 \
  --actor_learning_rate 5e-7 --lr_warmup_ratio 0.05 --l2 0.01 --seed 7 \
  --remote_rm_url ./rewards/answer.py --dynamic_filtering --dynamic_filtering_reward_range 0 1 \
  --zero_stage 3 --bf16 --gradient_checkpointing --packing_samples --flash_attn \
  --save_path ./out/grpo-7b --save_steps 20 --max_ckpt_num 4 --load_checkpoint --logging_steps 1 \
  --use_wandb 89abcdef0123456789abcdef0123456789abcdef --wandb_project grpo --wandb_org team
