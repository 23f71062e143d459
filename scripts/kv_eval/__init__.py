"""Parts of scripts/eval_gpt_oss.py: tasks, server, harness, results, divergence."""
