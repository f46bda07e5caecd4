// The two activations, fp32. exp(-z) is infinite from z = -89 on, and the quotient then 0, as it should be.
#pragma once

#include "reduce.cuh"

// Of SiLU, x sigmoid(x).
inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + exponential(-x)); }

// Of GELU in the form with tanh: x (1 + tanh(z)) / 2 = x sigmoid(2 z), with z = sqrt(2 / pi) (x + CUBIC x^3).
constexpr float SCALE = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.044715f;
inline float sigmoid_of_cubic(float x) { return sigmoid(SCALE * fmaf(CUBIC * x * x, x, x)); }
