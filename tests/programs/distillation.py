"""Knowledge distillation: a frozen teacher in `compute_loss`, a student that is the model itself, temperature."""

import keras
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(79)
flat = images.reshape(-1, 64)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False, training=True):
        teacher = self.teacher(x, training=False)
        student = self.student_loss_fn(y, y_pred)
        distilled = self.distillation_loss_fn(
            ops.softmax(teacher / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student + (1 - self.alpha) * distilled

    def call(self, x):
        return self.student(x)


def network(units, name):
    return keras.Sequential([layers.Input((64,)), layers.Dense(units, "tanh"), layers.Dense(10)], name=name)


with scope.scope():
    teacher = network(24, "teacher")
    teacher.compile(keras.optimizers.Adam(0.01), loss)
    teacher.fit(flat, labels, batch_size=32, epochs=2, shuffle=False, verbose=0)
    teacher.trainable = False
    distiller = Distiller(network(6, "student"), teacher)
    distiller.compile(
        keras.optimizers.Adam(0.01),
        ["accuracy"],
        student_loss_fn=loss,
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
history = distiller.fit(flat, labels, batch_size=32, epochs=2, shuffle=False, verbose=0)
results = {
    "student": weights(distiller.student),
    "teacher": weights(teacher),
    "history": history.history,
    "evaluated": distiller.evaluate(flat, labels, batch_size=32, verbose=0, return_dict=True),
}
