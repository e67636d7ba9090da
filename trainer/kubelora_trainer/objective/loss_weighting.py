"""Weights of a sample's error: min-SNR by its timestep, a mask by its pixels.

These are pure functions of tensors, separate from the objective, each with the source of its
formula.
"""

import torch
from torch import Tensor

from kubelora_api.training_spec import Training


def signal_to_noise(alphas_cumprod: Tensor, timesteps: Tensor) -> Tensor:
    """Compute SNR(t) = abar_t / (1 - abar_t), fp32 (n): the signal's power over the noise's.

    alphas_cumprod: (T), of the noise schedule. timesteps: int64 (n). 0 at zero terminal SNR.
    """
    signal = alphas_cumprod.to(timesteps.device)[timesteps].double()
    return (signal / (1.0 - signal)).float()


def min_snr_weights(snr: Tensor, gamma: float, prediction: str) -> Tensor:
    """Compute min-SNR-gamma weights, fp32 (n) (Hang et al. 2023, sec. 3.4).

    The weight of the image's squared error is min(SNR, gamma) for any prediction type. The squared
    error in the noise is SNR times that in the image, and in v it is SNR + 1 times that in the
    image, hence min(SNR, gamma) / SNR (epsilon) and min(SNR, gamma) / (SNR + 1) (v). At SNR 0 the
    first tends to 1 and the second is 0: pure noise contains no information about the image.

    Args:
        snr: Signal-to-noise ratio of each sample, (n).
        gamma: Upper limit of the ratio.
        prediction: Prediction type of the model.
    """
    if prediction == "v_prediction":
        return torch.clamp(snr, max=gamma) / (snr + 1.0)
    # min(SNR, gamma) / SNR, written so that zero terminal SNR does not give 0 / 0.
    return torch.where(snr > gamma, gamma / snr, torch.ones_like(snr))


def timestep_weights(
    training: Training, alphas_cumprod: Tensor, timesteps: Tensor, prediction: str
) -> Tensor:
    """Compute the weight of each sample's loss by its timestep, fp32 (n); 1 without min-SNR.

    Args:
        training: The job's ``spec.training``.
        alphas_cumprod: (T), of the noise schedule.
        timesteps: int64 (n).
        prediction: Prediction type of the model.
    """
    if training.min_snr_gamma is None:
        return torch.ones(len(timesteps), device=timesteps.device)
    snr = signal_to_noise(alphas_cumprod, timesteps)
    return min_snr_weights(snr, training.min_snr_gamma, prediction)


def mean_errors(errors: Tensor, masks: Tensor | None) -> Tensor:
    """Compute each sample's mean error, (n).

    errors: (n, channels, h, w). masks: (n, 1, h, w) from 0 to 1, or None for all of each image. The
    mean is over all elements, with masked ones as 0: an element counts the same whether its image
    is masked or not, and a small object does not get the weight of an entire image.
    """
    if masks is not None:
        errors = errors * masks
    return errors.mean(dim=(1, 2, 3))
