"""Started by path from the batch shell: what follows from how an attempt ended."""

from olmo_ext.launch.slurm_job import answer, end

if __name__ == "__main__":
    answer(end)
