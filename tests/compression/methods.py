"""All methods, for tests that hold for each."""

from tfdist import compression as c

UNBIASED = [
    c.Float16(stochastic=True),
    c.BFloat16(stochastic=True),
    c.Float8("e4m3", stochastic=True),
    c.Float8("e5m2", stochastic=True),
    c.Int8(stochastic=True),
    c.Int4(stochastic=True),
    c.QSGD(),
    c.QSGD(levels=7),
    c.QSGD(levels=1, block=64),
    c.TernGrad(clip=None),
    c.RandomK(0.1),
    c.Atomo(0.1),
    c.AtomoSVD(2),
]
BIASED = [
    c.Float16(),
    c.BFloat16(),
    c.Float8("e4m3"),
    c.Float8("e5m2"),
    c.Int8(),
    c.Int4(),
    c.OneBit(),
    c.SignSGD(),
    c.TopK(0.05),
    c.Threshold(1e-3),
    c.Strom(tau=1e-3),
    c.Strom(density=0.02),
    c.PowerSGD(2),
]
OWN_RESIDUAL = [
    c.DeepGradientCompression(0.05, momentum=0.0),
    c.DeepGradientCompression(0.05, momentum=0.9, clip_norm=1.0, warmup_steps=2),
    c.SignSGD(scaled=False),
]
CLIPPED = [c.TernGrad(), c.TernGrad(block=500, clip=1.5)]
ALL = UNBIASED + BIASED + OWN_RESIDUAL + CLIPPED
