"""The parameter server: published weights to pull, in ``shared_memory`` on one host, over ``tcp`` from others."""
