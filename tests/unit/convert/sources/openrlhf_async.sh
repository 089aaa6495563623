MODEL=(--actor.model_name_or_path org/base-4b --reward.model_name_or_path org/rm-4b --actor.num_gpus_per_node 4)
python3 -m openrlhf.cli.train_ppo_ray ${MODEL[@]} --ref.num_gpus_per_node 4 --reward.num_gpus_per_node 4 \
  --vllm.num_engines 4 --vllm.tensor_parallel_size 1 --train.colocate_all --train.async_enable \
  --train.async_queue_size 2 --ref.offload --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 \
  --rollout.max_new_tokens 1024 --data.max_len 2048 --data.prompt_dataset org/prompts --ds.packing_samples \
  --algo.kl.init_coef 0.01 --algo.kl.use_loss --ds.zero_stage 3 --rollout.batch_size 128 --train.batch_size 1024
