"""Several hosts: who there is, who is alive, who decides for a job, and what was decided.

`store` is what all of it rests on: a small interface that etcd serves (`etcd`), or this process itself where
there is one host only (`embedded`).
"""
