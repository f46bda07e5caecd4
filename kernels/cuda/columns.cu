// Sum over rows of partial sums: the second half of every gradient that is a sum over all positions.
//
//     out[i] += sum over r < rows of partial[r, i]
//
// Layout: partial (rows, columns) and out (columns,) fp32. Work: a thread owns a column. Determinism: rows in order.

__global__ void add_rows(float* out, const float* partial, int rows, int columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= columns) return;
    float sum = 0.0f;
    for (int row = 0; row < rows; row++) sum += partial[(long long)row * columns + i];
    out[i] += sum;
}
