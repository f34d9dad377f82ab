"""The assets of the reference location: ride hailing, and the churn of a repository's directories."""
