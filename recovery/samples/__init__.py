"""Which samples each minibatch had, as workers write it down (`proxyrun --samples`): read, and judged."""
