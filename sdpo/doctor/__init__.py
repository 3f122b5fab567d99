"""What this machine has, and what a run would cost, before it is started.

python -m sdpo.doctor [config.yaml]
"""
