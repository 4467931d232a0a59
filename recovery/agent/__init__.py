"""Opens and ends sessions, here and for leaders elsewhere, and wires what each job needs."""
