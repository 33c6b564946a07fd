"""The parameter server: published weights, pulled from ``shared_memory`` on one host, over ``tcp`` from others."""
