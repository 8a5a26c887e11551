/* The part of CUDA's driver interface that the pool uses: types as in NVIDIA's cuda.h, functions found by dlopen. No CUDA headers needed. */
#ifndef DEPTHFX_CUDA_DRIVER_H
#define DEPTHFX_CUDA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemHandle;

enum { CUDA_SUCCESS = 0, CUDA_ERROR_OUT_OF_MEMORY = 2 };
enum { VIRTUAL_MEMORY_SUPPORTED = 102, RDMA_WITH_VIRTUAL_MEMORY_SUPPORTED = 110 }; /* CUdevice_attribute */
enum { LOCATION_DEVICE = 1, ALLOCATION_PINNED = 1, GRANULARITY_MINIMUM = 0, PROT_READWRITE = 3, CAPTURE_MODE_RELAXED = 2 };

typedef struct { int type; int id; } CUmemLocation;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    int type;
    int requested_handle_types;
    CUmemLocation location;
    void* win32_meta_data;
    struct { unsigned char compression, rdma_capable; unsigned short usage; unsigned char reserved[4]; } flags;
} CUmemAllocationProp;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "CUmemAllocationProp must be laid out as in cuda.h");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "CUmemAccessDesc must be laid out as in cuda.h");

/* X(member, exported symbol, arguments) */
#define DRIVER_FUNCTIONS(X)                                                                              \
    X(init, cuInit, (unsigned))                                                                          \
    X(device_get, cuDeviceGet, (CUdevice*, int))                                                         \
    X(device_attribute, cuDeviceGetAttribute, (int*, int, CUdevice))                                     \
    X(total_memory, cuDeviceTotalMem_v2, (size_t*, CUdevice))                                            \
    X(free_memory, cuMemGetInfo_v2, (size_t*, size_t*))                                                  \
    X(context_retain, cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                  \
    X(context_release, cuDevicePrimaryCtxRelease_v2, (CUdevice))                                         \
    X(context_push, cuCtxPushCurrent_v2, (CUcontext))                                                    \
    X(context_pop, cuCtxPopCurrent_v2, (CUcontext*))                                                     \
    X(context_synchronize, cuCtxSynchronize, (void))                                                     \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int*))                                           \
    X(granularity, cuMemGetAllocationGranularity, (size_t*, const CUmemAllocationProp*, int))            \
    X(reserve, cuMemAddressReserve, (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))     \
    X(address_free, cuMemAddressFree, (CUdeviceptr, size_t))                                             \
    X(create, cuMemCreate, (CUmemHandle*, size_t, const CUmemAllocationProp*, unsigned long long))       \
    X(release, cuMemRelease, (CUmemHandle))                                                              \
    X(map, cuMemMap, (CUdeviceptr, size_t, size_t, CUmemHandle, unsigned long long))                     \
    X(unmap, cuMemUnmap, (CUdeviceptr, size_t))                                                          \
    X(set_access, cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                 \
    X(error_name, cuGetErrorName, (CUresult, const char**))                                              \
    X(error_string, cuGetErrorString, (CUresult, const char**))

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
