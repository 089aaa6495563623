torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_files=/d/train.parquet \
  data.val_files=/d/test.parquet data.prompt_key=question data.response_key=answer data.max_length=2048 \
  data.train_batch_size=64 data.micro_batch_size_per_gpu=2 data.truncation=error model.partial_pretrain=org/base-7b \
  model.lora_rank=16 model.lora_alpha=32 model.target_modules=[q_proj,v_proj] optim.lr=2e-5 \
  optim.warmup_steps_ratio=0.05 use_remove_padding=true trainer.total_epochs=3 trainer.project_name=p \
  trainer.experiment_name=sft-7b trainer.logger=['console'] trainer.default_hdfs_dir=null trainer.default_local_dir=/out
