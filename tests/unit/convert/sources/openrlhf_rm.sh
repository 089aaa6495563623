LR=9e-6
deepspeed --include localhost:0,1 --module openrlhf.cli.train_rm --pretrain org/sft-8b --dataset org/pairs \
  --prompt_key prompt --learning_rate ${LR} --max_epochs 1 --max_len 8192 --loss sigmoid --margin_loss \
  --train_batch_size 64 --micro_train_batch_size 1 --value_head_prefix score --eval_dataset org/pairs-test \
  --eval_split test --eval_steps 50 --compute_fp32_loss --use_tensorboard ./tb --save_path /models/rm
