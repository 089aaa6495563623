"""Jobs of `benchmarks/cases/eighth_set_aside` that are re-told, of frameworks for RL post-training: the error lines
that the named programs print, as a public issue thread (`source`) quotes them, with surroundings of our own. Their
files are kept as they are.

The threads are a sample of what users of several GPUs meet who train language and vision-language models with RL,
SFT or DPO. The rule was fixed before anything was looked up:

1. The frameworks, in this order: OpenRLHF, TRL, verl, VLM-R1, R1-V, open-r1, EasyR1, slime, AReaL, NeMo-RL, ROLL,
   SkyRL, prime-rl, rllm, Verifiers, ms-swift, LLaMA-Factory, Axolotl, unsloth, torchtune, DeepSpeed, accelerate,
   PyTorch FSDP, NCCL, Ray, vLLM, SGLang, Megatron-LM.
2. The queries about each F, to a search by meaning among public issue threads: `F multi-GPU training stuck or fails,
   log attached, the cause was`, `F RuntimeError in one worker during rollout or training, resolved`, and for healthy
   jobs `F prints warnings or errors but training still works, can be ignored`.
3. Only threads with an even number are taken. The results of a query are read in their order; the first is taken that
   is a thread of one job, quotes a log, and has an established cause: a resolution by a maintainer or by the
   reporter, or an error line that leaves one cause only. A thread is skipped that lacks one of these, that earlier
   sets have, that another query has given already, that is of a job on one GPU without anything distributed, or that
   fails before any job starts (installation).
4. Where this gives fewer than 65, the next results of the queries are taken in the same way, one a query.
5. From the third query, jobs are taken whose warnings did no harm as the thread says.

Changed twice before a thread was taken, as the search goes by meaning and leaves names aside. The queries about the
first three F gave programs that have nothing to do with them; `F` with a symptom, asked for the first six F, did so too
(only those of OpenRLHF and vLLM gave threads that fit). What was asked in the end are queries shaped like the logs of
F, one or two for each: the command, the classes or the processes that F's logs name, and `error`, `traceback` or
`hang` (such as `verl main_ppo WorkerDict RayTaskError traceback`); for healthy jobs eight queries with the warnings
that these programs print at their start, in training and at their end, and `harmless` or `can be ignored`. As a query
gives about ten threads, half of them even, all that fit are taken, not the first one only.

The truth is the class of the established cause, not of the first error line; culprits are named only where a
careful reader of the log could.
"""

from benchmarks.set_aside_jobs.entry import Entry

ENTRIES: list[Entry] = []
