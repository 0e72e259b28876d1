"""Whether hosts are fit for a job: facts of all of them, checks over these, and a report that can be kept."""
