"""stable-baselines3 after its README: `policies.py PPO|DQN OUT` learns CartPole, is saved, loaded, and learns on."""

import sys
from pathlib import Path

import stable_baselines3
from stable_baselines3.common.evaluation import evaluate_policy

KIND, FILE = getattr(stable_baselines3, sys.argv[1]), Path(sys.argv[2]) / "policy.zip"
SIZES = {
    "PPO": {"n_steps": 64, "batch_size": 32, "n_epochs": 3},
    "DQN": {"learning_starts": 50, "batch_size": 16, "train_freq": 4, "target_update_interval": 60},
}
model = KIND("MlpPolicy", "CartPole-v1", seed=1, verbose=0, **SIZES[sys.argv[1]])
model.learn(128)
model.save(FILE)
loaded = KIND.load(FILE, env=model.get_env())
loaded.learn(128, reset_num_timesteps=False)
print("KEPT", evaluate_policy(loaded, loaded.get_env(), n_eval_episodes=2), flush=True)
