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

Changed after the queries about the first three F had been answered: the search goes by meaning, these queries named
none, and nearly all answers were of other programs. In their place each F gets two queries of the form `F S` with the
symptoms S of this list, two for each F in turn, beginning anew at its end: `NCCL watchdog timeout ALLGATHER`, `CUDA
out of memory`, `worker died SIGKILL exitcode -9`, `KeyError or ValueError in worker traceback`, `vLLM engine died`,
`update weights fails`, `connection refused or request timeout to server`, `checkpoint saving fails or hangs`, `loss
nan or gradient overflow`, `placement group pending not enough GPUs`, `illegal memory access`, `ImportError undefined
symbol version`, `warning can be ignored`. Nothing else of the rule was changed by this.

The truth is the class of the established cause, not of the first error line; culprits are named only where a
careful reader of the log could.
"""

from benchmarks.set_aside_jobs.entry import Entry

ENTRIES: list[Entry] = []
