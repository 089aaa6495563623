trl grpo --model_name_or_path=org/base-1b --dataset-name org/problems --num_processes 4 \
  --reward_funcs accuracy_reward think_format_reward rewards.style --reward_weights 1.0 0.5 0.25 \
  --num_generations 8 --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --num_iterations 2 \
  --max_completion_length 1024 --temperature 0.9 --beta 0.04 --epsilon 0.2 --epsilon_high 0.28 \
  --loss_type dr_grpo --scale_rewards none --mask_truncated_completions \
  --use_vllm --vllm_mode server --vllm_server_host 10.0.0.2 --max_steps 800 --save_steps 80 --learning_rate 2e-6
