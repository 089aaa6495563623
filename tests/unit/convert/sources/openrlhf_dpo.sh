deepspeed --module openrlhf.cli.train_dpo \
  --model.model_name_or_path org/sft-8b --ref.model_name_or_path org/sft-8b \
  --data.dataset org/pairs --data.apply_chat_template --data.chosen_key chosen --data.rejected_key rejected \
  --data.max_len 2048 --train.batch_size 128 --train.micro_batch_size 1 --train.max_epochs 1 \
  --adam.lr 5e-7 --model.beta 0.1 --model.nll_loss_coef 0.2 --model.label_smoothing 0.1 \
  --ds.zero_stage 3 --ds.adam_offload --ds.ring_attn_size 2 --ds.ring_attn_head_stride 2 \
  --actor.gradient_checkpointing_enable \
  --ckpt.output_dir ./ckpt/dpo
