"""Jobs of `benchmarks/cases/seventh_set_aside` that are re-told, of frameworks for RL post-training: the error lines
that the named programs print, as a public issue thread (`source`) quotes them, with surroundings of our own. Their
files are kept as they are. `seventh_trainer_told_entries.py` has those of trainers, collectives, engines and
healthy jobs.

The threads are a sample of what users of several GPUs meet who train language and vision-language models with RL,
SFT or DPO. The rule was fixed before anything was looked up:

1. The frameworks, in this order: OpenRLHF, TRL, verl, VLM-R1, R1-V, open-r1, EasyR1, slime, AReaL, NeMo-RL, ROLL,
   SkyRL, prime-rl, ms-swift, LLaMA-Factory, Axolotl, unsloth, torchtune, DeepSpeed, accelerate, PyTorch
   distributed, NCCL, Ray, vLLM, SGLang, Megatron-LM, Megatron-Bridge.
2. The queries about each F, to a search by meaning among public issue threads: `F training hangs NCCL timeout
   watchdog`, `F crash traceback out of memory killed weight sync error`, and for healthy jobs `F warning in log
   harmless, training continues normally`.
3. The results of a query are read in their order. The first is taken that is a thread of one job (no feature
   request, no pull request without a report), quotes a log, and has an established cause: a resolution by a
   maintainer or by the reporter, or an error line that leaves one cause only. A thread is skipped that lacks one
   of these, that earlier sets have, that another query has given already, that is of a job on one GPU without
   anything distributed, or that fails before any job starts (installation). Where only a part of a thread is
   found, its title is queried once more.
4. Where this gives fewer than 60, the next results of the queries are taken in the same way, one a query.
5. From the third query, jobs are taken whose warnings did no harm as the thread says.

Changed after the first queries had been answered: the search goes by the meaning of the symptom more than by F, so that
the second query gave crashes of other programs for most F, and the first the same threads again. They are read for
what is new in them; in addition, `F LLM fine-tuning multi-GPU RuntimeError traceback, solved` is asked for each F, and
for the frameworks of RL `F GRPO rollout engine worker died, cause found`, and threads are taken from these as above.

The truth is the class of the established cause, not of the first error line; culprits are named only where a
careful reader of the log could.
"""

from benchmarks.set_aside_jobs.entry import Entry

ENTRIES: list[Entry] = []
