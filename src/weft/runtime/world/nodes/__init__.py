"""Several nodes of one job: a store for those who know the secret of the run, where launchers and ranks meet."""
