set -x
TRAIN="['/data/a.parquet','/data/b.parquet']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    data.train_files="$TRAIN" data.val_files=/data/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=org/base-7b actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    custom_reward_function.path=rewards/math.py custom_reward_function.name=score \
    trainer.logger='["console","wandb"]' trainer.project_name=math trainer.experiment_name=grpo_7b \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=4
