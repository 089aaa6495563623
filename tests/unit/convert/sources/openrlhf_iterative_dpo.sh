OUT=./rounds/generate.jsonl
PAIRS=./rounds/pairs.jsonl
MODEL=./rounds/model
POLICY=org/sft-8b
REFERENCE=$POLICY
round=0
while (($round < 3)); do
   if ((round > 0)); then
      POLICY=$MODEL
   fi
   read -r -d '' sample <<END
openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain $POLICY --max_new_tokens 1024 \
   --prompt_max_len 512 --dataset org/prompts --input_key messages --apply_chat_template --temperature 0.8 \
   --tp_size 2 --best_of_n 4 --enable_prefix_caching --max_num_seqs 64 --iter $round --rollout_batch_size 4096 \
   --output_path $OUT
END
   python -m $sample
   read -r -d '' rate <<END
openrlhf.cli.batch_inference --eval_task rm --pretrain org/rm-8b --bf16 --max_len 2048 --dataset $OUT \
   --dataset_probs 1.0 --zero_stage 0 --post_processor iter_dpo --micro_batch_size 4 --output_path $PAIRS
END
   deepspeed --module $rate
   read -r -d '' learn <<END
openrlhf.cli.train_dpo --max_len 2048 --dataset $PAIRS --dataset_probs 1.0 --train_batch_size 128 \
   --micro_train_batch_size 2 --pretrain $POLICY --ref_pretrain $REFERENCE --save_path $MODEL --zero_stage 3 \
   --max_epochs 1 --bf16 --beta 0.2 --learning_rate 4e-7 --gradient_checkpointing
END
   deepspeed --num_gpus 8 --module $learn
   round=$((round + 1))
done
