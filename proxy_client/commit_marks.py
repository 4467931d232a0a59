"""Marks minibatches: the end of each optimizer step is a commit (paper 001, section 4.2.2).

Every step is a commit of its own, also when several optimizers step one after the other. A step that
GradScaler skips never begins. If a step raises, no mark follows: the phase stays OPTIMIZER until the next
step ends, so what runs in between has the weaker protection of that phase.
"""

from __future__ import annotations


def install() -> None:
    """Registers the global optimizer hooks."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from understudy.proxy_client import _client, state_names
    from understudy.proxy_client.samples import hooks

    def before_step(*_: object) -> None:
        _client.begin_optimizer_phase()

    def after_step(optimizer: object, *_: object) -> None:
        state_names.stepped(optimizer)
        _client.commit_step()
        hooks.stepped()

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
