"""Beyond the paper: what `complement`, which needs no probes, gains over FedCor (`table`), which of
its parts matter (`ablation`), where it fails (`limits`), which clients it serves (`fairness`).
"""
