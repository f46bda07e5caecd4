// Elementwise functions of SiLU and GELU, in fp32.
//
// Below z = -88.7 exponential(-z) is infinite and its reciprocal 0, which is the right limit of sigmoid(z).
#pragma once

#include "reduce.cuh"

// 1 / x with an error of one ulp. Subnormal results are flushed to 0.
inline float reciprocal(float x) {
    float quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(x));
    return quotient;
}

// SiLU is x * sigmoid(x).
inline float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

// GELU in its tanh form: x (1 + tanh(z)) / 2 = x sigmoid(2 z), z = sqrt(2 / pi) (x + GELU_CUBIC x^3).
constexpr float GELU_SCALE = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float GELU_CUBIC = 0.044715f;

// sigmoid(2 z): GELU is x * sigmoid_of_cubic(x).
inline float sigmoid_of_cubic(float x) {
    return sigmoid(x * fmaf(GELU_SCALE * GELU_CUBIC, x * x, GELU_SCALE));
}

// GELU's derivative: s + x s (1 - s) d(2 z)/dx, where s = sigmoid(2 z).
inline float gelu_slope(float x) {
    const float s = sigmoid_of_cubic(x);
    return fmaf(fmaf(-s, s, s), x * fmaf(3.0f * GELU_SCALE * GELU_CUBIC, x * x, GELU_SCALE), s);
}
