/* The part of CUDA's driver interface that the pool uses: virtual memory management. */
#ifndef DEPTHFX_POOL_DRIVER_H
#define DEPTHFX_POOL_DRIVER_H

typedef unsigned long long CUmemHandle;

enum { VIRTUAL_MEMORY_SUPPORTED = 102, RDMA_WITH_VIRTUAL_MEMORY_SUPPORTED = 110 }; /* CUdevice_attribute */
enum { LOCATION_DEVICE = 1, ALLOCATION_PINNED = 1, GRANULARITY_MINIMUM = 0, PROT_READWRITE = 3 };

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

#include "../cuda_driver.h"

#endif
