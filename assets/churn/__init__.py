"""Code churn: how much every directory of a repository changes in every month."""
