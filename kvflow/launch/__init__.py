"""Building and starting whole deployments: the one place that chooses transports."""
