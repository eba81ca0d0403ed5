"""Started by path from the batch shell: which run this job is for."""

from olmo_ext.launch.slurm_job import answer, begin

if __name__ == "__main__":
    answer(begin)
