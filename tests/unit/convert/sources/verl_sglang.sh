python3 -m verl.trainer.main_ppo --config-path=conf --config-name=ppo_trainer \
  algorithm.adv_estimator=reinforce_plus_plus_baseline data.train_files=/d/t.parquet \
  actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4 \
  actor_rollout_ref.actor.clip_ratio_high=4e-4 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  +ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=3.0 trainer.total_training_steps=10 no_such.option=1
