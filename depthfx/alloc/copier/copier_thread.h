/* The thread: issues chunks where there is room, else waits for the oldest batch, else for work. */
#ifndef DEPTHFX_COPIER_THREAD_H
#define DEPTHFX_COPIER_THREAD_H

#include "copier_state.h"

static void die(Copier* copier, const char* why) {
    pthread_mutex_lock(&copier->lock);
    copier->died = 1;
    snprintf(copier->why, WHY, "%s", why);
    for (Job* job = copier->jobs; job != NULL; job = job->next) fail_job(job, why);
    settle_all(copier);
    pthread_mutex_unlock(&copier->lock);
}

/* Runs the hook of a place; what fails there fails `job`, which must be held by the caller, or be NULL for the next one. */
static void pass(Copier* copier, int place, Job* job) {
    char why[WHY];
    int result = hook(&copier->hooks, place, why, sizeof why);
    if (result == HOOK_ENDS) die(copier, why);
    if (result != HOOK_FAILED) return;
    pthread_mutex_lock(&copier->lock);
    if (job == NULL) job = next_job(copier);
    if (job != NULL) fail_job(job, why);
    settle_all(copier);
    pthread_mutex_unlock(&copier->lock);
}

/* Takes the next chunks of the waiting jobs, at most half of what may be under way; the caller holds the lock. */
static Batch* gather(Copier* copier) {
    Batch* batch = copier->batches + (copier->issued + 1) % (uint64_t)copier->most;
    int half = (copier->most + 1) / 2;
    batch->num_pieces = batch->num_chunks = batch->has_event = 0;
    for (Job* job; batch->num_chunks < half && (job = next_job(copier)) != NULL;) {
        size_t room = (size_t)(half - batch->num_chunks), left = job->bytes - job->issued;
        size_t chunks = (left - 1) / job->chunk + 1;
        size_t taken = chunks <= room ? left : room * job->chunk;
        batch->pieces[batch->num_pieces++] = (Piece){job, job->issued, job->issued + taken};
        batch->num_chunks += (int)(chunks <= room ? chunks : room);
        job->issued += taken;
        job->in_hand = 1;
        job->holds++;
    }
    copier->issuing = batch->num_pieces > 0;
    return batch->num_pieces ? batch : NULL;
}

static void fail_now(Copier* copier, Job* job, const char* why) {
    pthread_mutex_lock(&copier->lock);
    fail_job(job, why);
    pthread_mutex_unlock(&copier->lock);
}

static int copy(Copier* copier, char* target, const char* source, size_t size, char* why) {
    const CudaDriver* driver = &copier->driver;
    if (!copier->queues) {
        memcpy(target, source, size);
        return 0;
    }
    return check(driver, driver->copy((CUdeviceptr)(uintptr_t)target, source, size, copier->stream), "cuMemcpyHtoDAsync", why);
}

/* Chunk by chunk, so that a cancel waits for the one that is being handed over and no longer. */
static void hand_over(Copier* copier, Piece* piece) {
    Job* job = piece->job;
    char why[WHY];
    size_t end = piece->end;
    piece->end = piece->first;
    if (piece->first == 0 && job->after != NULL && !job->cancelled &&
        check(&copier->driver, copier->driver.stream_wait(copier->stream, job->after, 0), "cuStreamWaitEvent", why)) {
        fail_now(copier, job, why);
        return;
    }
    while (piece->end < end && !job->cancelled) {
        size_t size = end - piece->end < job->chunk ? end - piece->end : job->chunk;
        if (copy(copier, job->target + piece->end, job->source + piece->end, size, why)) {
            fail_now(copier, job, why);
            return;
        }
        piece->end += size;
    }
}

/* The event behind a batch. Without one nobody could wait for the chunks, so they end before anybody hears of the failure. */
static void record(Copier* copier, Batch* batch) {
    char why[WHY];
    if (!copier->queues) return;
    batch->has_event = !check(&copier->driver, copier->driver.event_record(batch->event, copier->stream), "cuEventRecord", why);
    if (batch->has_event) return;
    copier->driver.stream_synchronize(copier->stream);
    for (int i = 0; i < batch->num_pieces; i++) fail_now(copier, batch->pieces[i].job, why);
}

static void issue(Copier* copier) {
    pass(copier, BEFORE_CHUNK, NULL);
    pthread_mutex_lock(&copier->lock);
    Batch* batch = copier->died ? NULL : gather(copier);
    pthread_mutex_unlock(&copier->lock);
    if (batch == NULL) return; /* cancelled or failed meanwhile */
    for (int i = 0; i < batch->num_pieces; i++) hand_over(copier, batch->pieces + i);
    record(copier, batch);
    pthread_mutex_lock(&copier->lock);
    copier->issuing = 0;
    copier->issued++;
    copier->num_flying += batch->num_chunks;
    for (int i = 0; i < batch->num_pieces; i++) {
        Piece piece = batch->pieces[i];
        piece.job->in_hand = 0;
        if (piece.end > piece.first) piece.job->batch = copier->issued;
    }
    pthread_cond_broadcast(&copier->changed);
    pthread_mutex_unlock(&copier->lock);
    pass(copier, AFTER_CHUNK, batch->pieces[0].job);
}

static void land(Copier* copier) {
    Batch* batch = copier->batches + (copier->landed + 1) % (uint64_t)copier->most;
    char why[WHY];
    int failed = batch->has_event && check(&copier->driver, copier->driver.event_synchronize(batch->event), "cuEventSynchronize", why);
    for (int i = 0; !failed && i < batch->num_pieces; i++)
        if (batch->pieces[i].end == batch->pieces[i].job->bytes) pass(copier, BEFORE_DONE, batch->pieces[i].job);
    pthread_mutex_lock(&copier->lock);
    copier->landed++;
    copier->num_flying -= batch->num_chunks;
    for (int i = 0; i < batch->num_pieces; i++) {
        Piece piece = batch->pieces[i];
        if (failed) fail_job(piece.job, why);
        else if (!piece.job->failed) copier->copied_bytes += (int64_t)(piece.end - piece.first);
        if (piece.end == piece.job->bytes && !piece.job->failed && !piece.job->cancelled) piece.job->copied = 1;
        piece.job->holds--;
    }
    settle_all(copier);
    pthread_mutex_unlock(&copier->lock);
}

static void end_device(Copier* copier) {
    CUcontext popped;
    for (int i = 0; i < copier->most; i++)
        if (copier->batches[i].event != NULL) copier->driver.event_destroy(copier->batches[i].event);
    if (copier->stream != NULL) copier->driver.stream_destroy(copier->stream);
    copier->driver.context_pop(&popped);
    copier->driver.context_release(copier->device);
}

static void* work(void* argument) {
    Copier* copier = argument;
    char why[WHY];
    int mode = CAPTURE_MODE_RELAXED, issues;
    if (copier->queues && check(&copier->driver, copier->driver.context_push(copier->context), "cuCtxPushCurrent", why)) die(copier, why);
    if (copier->queues) copier->driver.capture_mode(&mode); /* another thread's capture is none of this thread's calls' business */
    for (;;) {
        pthread_mutex_lock(&copier->lock);
        while (!copier->died && !copier->closing && copier->issued == copier->landed && next_job(copier) == NULL)
            pthread_cond_wait(&copier->changed, &copier->lock);
        issues = !copier->died && next_job(copier) != NULL && copier->most - copier->num_flying >= (copier->most + 1) / 2;
        int lands = copier->issued != copier->landed;
        pthread_mutex_unlock(&copier->lock);
        if (issues) issue(copier);
        else if (lands) land(copier);
        else break;
    }
    if (copier->queues) end_device(copier);
    pthread_mutex_lock(&copier->lock);
    copier->thread_ended = 1;
    pthread_cond_broadcast(&copier->changed);
    pthread_mutex_unlock(&copier->lock);
    return NULL;
}

#endif
