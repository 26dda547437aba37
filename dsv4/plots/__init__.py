"""Pictures: plan.py draws memory against context, results.py benchmarks; style.py is what they
share."""
