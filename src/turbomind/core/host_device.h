#pragma once

// TM_HD marks a function that is compiled for host and device. On the host it is always inlined, so
// that a translation unit built for a newer instruction set emits no shared copy.
#if defined(__CUDACC__)
#define TM_HD __host__ __device__ __forceinline__
#else
#define TM_HD inline __attribute__((always_inline))
#endif
