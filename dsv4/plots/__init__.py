"""Plots: plan.py draws memory against context, results.py benchmarks; style.py has what both
share."""
