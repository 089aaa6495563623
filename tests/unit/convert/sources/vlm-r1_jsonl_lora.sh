DATA=/data/vqa.jsonl
torchrun --nproc_per_node=4 src/open_r1/grpo_jsonl.py \
  --output_dir out/vqa --model_name_or_path OpenGVLab/InternVL2_5-4B-MPO --dataset_name none \
  --data_file_paths "$DATA" --image_folders /data/images --reward_method math --reward_funcs accuracy format lang \
  --freeze_vision_modules true --max_pixels 1843200 --max_anyres_num 6 --max_prompt_length 4096 --temperature 0.7 \
  --use_peft true --lora_r 16 --lora_alpha 32 --lora_dropout 0.05 --lora_target_modules q_proj v_proj \
  --num_generations 8 --per_device_train_batch_size 4 --max_completion_length 512 --num_iterations 2 --beta 0 \
  --learning_rate 1e-5 --max_steps 500 --val_split_ratio 0.05 --arrow_cache_dir /tmp/c --deepspeed zero2.json
