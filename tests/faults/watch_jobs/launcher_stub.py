"""Starts a command once per rank with the variables that a launcher would set: `launcher_stub.py mpirun 2 -- python
training_job.py`. If a rank fails, ends the others and exits with its code."""

import os
import subprocess
import sys
import time


def variables(kind: str, rank: int, size: int) -> dict[str, str]:
    by_launcher: dict[str, dict[str, object]] = {
        # docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
        "mpirun": {
            "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_NODE_RANK": rank, "OMPI_UNIVERSE_SIZE": size,
            "PMIX_RANK": rank,
        },
        # MPICH's and Intel MPI's Hydra
        "hydra": {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size},
        "srun": {
            "SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_NPROCS": size, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
            "SLURM_NNODES": 1,
        },
        # deepspeed/launcher/launch.py
        "deepspeed": {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        },
        # Kubeflow passes the numbers of nodes, not ranks, to torchrun
        "kubeflow": {"RANK": rank, "WORLD_SIZE": size},
    }  # fmt: skip
    return {name: str(value) for name, value in by_launcher[kind].items()}


def main(kind: str, size: int, command: list[str]) -> int:
    ranks = [subprocess.Popen(command, env={**os.environ, **variables(kind, rank, size)}) for rank in range(size)]
    while True:
        codes = [each.poll() for each in ranks]
        failed = next((code for code in codes if code), 0)
        if failed or None not in codes:
            for each in ranks:
                each.kill()
                each.wait(10)
            return failed if failed >= 0 else 128 - failed
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[sys.argv.index("--") + 1 :]))
