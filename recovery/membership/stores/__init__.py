"""What hosts share: etcd, or memory where there is one host."""
