"""The sections of a campaign's report, each from the matrix of its runs."""
