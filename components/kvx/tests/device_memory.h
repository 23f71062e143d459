#ifndef KVX_TESTS_DEVICE_MEMORY_H
#define KVX_TESTS_DEVICE_MEMORY_H

/* GPU memory and streams for tests in C and Python: those of the first GPU, or of the stand-in.
 * NULL is the default stream. A failed call ends the program. */

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void* kvx_test_allocate(size_t num_bytes);
void kvx_test_free(void* memory);
/* Copies in the order of the stream and waits. Both addresses may be on the host or on the GPU. */
void kvx_test_copy(void* to, const void* from, size_t num_bytes, void* stream);
void* kvx_test_make_stream(void);
void kvx_test_free_stream(void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_TESTS_DEVICE_MEMORY_H */
