// The two activations, fp32. exp(-z) is infinite from z = -89 on, and the quotient then 0, as it should be.
#pragma once

#include "reduce.cuh"

// To one unit in the last place; 0 where that is no normal number.
inline float reciprocal(float x) {
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(x));
    return quotient;
}

// Of SiLU, x sigmoid(x).
inline float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

// Of GELU in the form with tanh: x (1 + tanh(z)) / 2 = x sigmoid(2 z), with z = sqrt(2 / pi) (x + CUBIC x^3).
constexpr float SCALE = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.044715f;
inline float sigmoid_of_cubic(float x) { return sigmoid(x * fmaf(SCALE * CUBIC, x * x, SCALE)); }

// GELU's derivative.
inline float gelu_slope(float x) {
    const float s = sigmoid_of_cubic(x);
    return fmaf(fmaf(-s, s, s), x * fmaf(3.0f * SCALE * CUBIC, x * x, SCALE), s);
}
