/* CUDA's driver interface without CUDA's headers: types as in NVIDIA's cuda.h, functions found by dlopen.
 * Whoever includes this has defined DRIVER_FUNCTIONS(X) with a line X(member, exported symbol, arguments) for each function it uses. */
#ifndef DEPTHFX_CUDA_DRIVER_H
#define DEPTHFX_CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef unsigned long long CUdeviceptr;

enum { CUDA_SUCCESS = 0, CUDA_ERROR_OUT_OF_MEMORY = 2 };
enum { CAPTURE_MODE_RELAXED = 2 };

typedef struct {
#define DECLARE(member, symbol, arguments) CUresult(*member) arguments;
    DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE
} CudaDriver;

/* Loads `library` and all functions into `driver`; 0, or -1 with the reason in `why`. */
static inline int load_driver(CudaDriver* driver, const char* library, char* why, size_t room) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(why, room, "%s cannot be loaded: %s", library, dlerror());
        return -1;
    }
#define FIND(member, symbol, arguments)                                     \
    *(void**)&driver->member = dlsym(handle, #symbol);                      \
    if (driver->member == NULL) {                                           \
        snprintf(why, room, "%s has no %s; update the driver", library, #symbol); \
        return -1;                                                          \
    }
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    return 0;
}

#endif
