{{/* The ways from outside to a service: Ingress and HTTPRoute. (dict "root" $ "component" "router" "given" .Values.router) */}}
{{- define "lorafleet.routes" -}}
{{- $given := .given }}
{{- $name := printf "%s-%s" (include "lorafleet.fullname" .root) .component }}
{{- if $given.ingress.enabled }}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $name }}
  labels:
    {{- include "lorafleet.labels" (pick . "root" "component") | nindent 4 }}
  {{- with $given.ingress.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $given.ingress.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  {{- with $given.ingress.tls }}
  tls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    {{- range $given.ingress.hosts }}
    - host: {{ . | quote }}
      http:
        paths:
          - path: {{ $given.ingress.path }}
            pathType: Prefix
            backend:
              service:
                name: {{ $name }}
                port:
                  name: http
    {{- end }}
{{- end }}
{{- if $given.httpRoute.enabled }}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $name }}
  labels:
    {{- include "lorafleet.labels" (pick . "root" "component") | nindent 4 }}
  {{- with $given.httpRoute.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs:
    {{- toYaml $given.httpRoute.parentRefs | nindent 4 }}
  {{- with $given.httpRoute.hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    - matches:
        - path:
            type: PathPrefix
            value: {{ $given.httpRoute.path }}
      # No timeout for streamed answers: the router has its own deadlines.
      timeouts:
        request: 0s
        backendRequest: 0s
      backendRefs:
        - name: {{ $name }}
          port: {{ $given.service.port }}
{{- end }}
{{- end }}
