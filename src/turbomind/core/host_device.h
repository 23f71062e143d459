#pragma once

// TM_HD marks a function that host and device compile alike. On the host it is always inlined, so
// that a translation unit built for a newer instruction set leaves no shared copy behind.
#if defined(__CUDACC__)
#define TM_HD __host__ __device__ __forceinline__
#else
#define TM_HD inline __attribute__((always_inline))
#endif
