#!/bin/bash
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 4))
overlong_buffer_len=1024
python3 -m recipe.dapo.main_dapo \
    data.train_files=/data/dapo.parquet data.prompt_key=prompt \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    data.train_batch_size=256 data.gen_batch_size=768 data.truncation='left' \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.model.path=org/base-32b +actor_rollout_ref.model.override_config.attention_dropout=0. \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True \
    reward_model.overlong_buffer.len=${overlong_buffer_len} reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.logger=['console','wandb'] trainer.experiment_name="DAPO 32B" trainer.nnodes=4 \
    trainer.total_training_steps=200 trainer.resume_mode=auto
