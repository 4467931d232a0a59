"""diffusers after its examples' train_unconditional.py: UNet2DModel, DDPM, EMA, accelerate, checkpoints, sampling.

`accelerate launch` says the precision.
"""

import math
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from digits import digits
from torch.utils.data import DataLoader, TensorDataset

DATA, OUT = sys.argv[1], Path(sys.argv[2])
set_seed(1)
accelerator = Accelerator(
    gradient_accumulation_steps=1, log_with="tensorboard",
    project_config=ProjectConfiguration(project_dir=str(OUT), logging_dir=str(OUT / "logs")),
)  # fmt: skip
model = UNet2DModel(
    sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8, attention_head_dim=8,
)  # fmt: skip
ema_model = EMAModel(
    model.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=0.75, model_cls=UNet2DModel,
    model_config=model.config,
)  # fmt: skip


def save_model_hook(models, weights, output_dir):
    if accelerator.is_main_process:
        ema_model.save_pretrained(str(Path(output_dir, "unet_ema")))
        for one in models:
            one.save_pretrained(str(Path(output_dir, "unet")))
            weights.pop()


def load_model_hook(models, input_dir):
    loaded = EMAModel.from_pretrained(str(Path(input_dir, "unet_ema")), UNet2DModel)
    ema_model.load_state_dict(loaded.state_dict())
    ema_model.to(accelerator.device)
    for _ in range(len(models)):
        one = models.pop()
        saved = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
        one.register_to_config(**saved.config)
        one.load_state_dict(saved.state_dict())


accelerator.register_save_state_pre_hook(save_model_hook)
accelerator.register_load_state_pre_hook(load_model_hook)
noise_scheduler = DDPMScheduler(num_train_timesteps=100, beta_schedule="linear")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)
images, _ = digits(DATA, 48)
pictures = torch.nn.functional.interpolate(images[:, None] / 127.5 - 1, 16)
loader = DataLoader(TensorDataset(pictures), batch_size=8, shuffle=True)
lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=12)
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
ema_model.to(accelerator.device)
accelerator.init_trackers("train_unconditional")
for epoch in range(2):
    model.train()
    for (clean,) in loader:
        noise = torch.randn(clean.shape, dtype=clean.dtype, device=clean.device)
        timesteps = torch.randint(0, 100, (clean.shape[0],), device=clean.device).long()
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(noisy, timesteps).sample.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
        logs = {
            "loss": loss.detach().item(),
            "lr": lr_scheduler.get_last_lr()[0],
            "ema_decay": ema_model.cur_decay_value,
        }
        accelerator.log(logs)
        if not math.isfinite(logs["loss"]):
            raise RuntimeError(f"loss {logs['loss']}")
        print("KEPT", epoch, logs, flush=True)
    accelerator.save_state(str(OUT / "checkpoint"))
    accelerator.load_state(str(OUT / "checkpoint"))
accelerator.wait_for_everyone()
unet = accelerator.unwrap_model(model)
ema_model.store(unet.parameters())
ema_model.copy_to(unet.parameters())
pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
pipeline.set_progress_bar_config(disable=True)
generator = torch.Generator(device=pipeline.device).manual_seed(0)
drawn = pipeline(generator=generator, batch_size=2, num_inference_steps=4, output_type="np").images
print("KEPT", float(drawn.mean()), drawn.shape, flush=True)
ema_model.restore(unet.parameters())
pipeline.save_pretrained(str(OUT / "pipeline"))
accelerator.end_training()
