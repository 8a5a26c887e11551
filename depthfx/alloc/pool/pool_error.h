/* Why a call failed: kept for its thread alone, until that thread's next call. */
#ifndef DEPTHFX_POOL_ERROR_H
#define DEPTHFX_POOL_ERROR_H

#include <stdarg.h>

#include "pool_driver.h"

enum { OK, BAD_REQUEST, BAD_STATE, OVER_CAPACITY, OUT_OF_MEMORY, DRIVER_FAILED, UNAVAILABLE };

typedef struct {
    int kind;
    char call[48], code[64], text[512];
} PoolError;

static CudaDriver driver;
static _Thread_local PoolError error;

__attribute__((format(printf, 2, 3))) static int fail(int kind, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    error = (PoolError){.kind = kind};
    vsnprintf(error.text, sizeof error.text, format, arguments);
    va_end(arguments);
    return -1;
}

/* 0 for success; else the driver's words about `call` become this thread's error. */
static int check(CUresult result, const char* call) {
    const char *name = NULL, *text = NULL;
    if (result == CUDA_SUCCESS) return 0;
    if (driver.error_name(result, &name) != CUDA_SUCCESS || name == NULL) name = "an unknown code";
    if (driver.error_string(result, &text) != CUDA_SUCCESS || text == NULL) text = "no text";
    fail(result == CUDA_ERROR_OUT_OF_MEMORY ? OUT_OF_MEMORY : DRIVER_FAILED, "%s (%d)", text, result);
    snprintf(error.call, sizeof error.call, "%s", call);
    snprintf(error.code, sizeof error.code, "%s", name);
    return -1;
}

#endif
