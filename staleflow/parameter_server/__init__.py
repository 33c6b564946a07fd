"""The parameter server: published weights that engines pull, in ``shared_memory`` on one host, over ``tcp`` from others."""
